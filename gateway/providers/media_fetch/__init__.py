"""Fetches media by URL from the hosts that the policy allows, for deployments whose API takes no URLs.

`base` is the interface. `fetcher` fetches, caches and checks; `parts` finds URLs in messages and puts data in their
place; `addresses` decides to which addresses the gateway connects. Without `media_fetch.hosts` in the policy, nothing
here runs. Begin at `fetcher`.
"""
