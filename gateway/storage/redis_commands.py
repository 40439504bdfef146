"""The keys, scripts and arguments of the commands that `RedisStorage` sends.

The scripts of reservations and slices are in `redis.lua`, and those of documents in `redis_documents.lua`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from gateway.storage.base import HELD_RETRY_SECONDS, Charge, RateCharge, SliceUse, SlotCharge

SCRIPT = Path(__file__).with_name("redis.lua").read_text()
SCRIPT_SHA1 = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()  # identifies the script in EVALSHA
KEYS_KEY = "wp:{keys}"
NOTICES_KEY = "wp:{notices}"
SLICE_ACCOUNT_SECONDS = 60.0  # how long the account of slots is kept after a report; longer than the lease
REPLICAS = "/"  # used as a tenant for the replicas' keys; no tenant has this name, since names are quoted completely
CHANGE_KEY = """
local kept = redis.call('HGET', KEYS[1], ARGV[1])
local revision = kept and tostring(cjson.decode(kept).revision or 0) or ''
if revision ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
RECORD_KEYS = ("wp:{records}", "wp:{records}:changes", "wp:{records}:store")
CHANGE_RECORD = """
local kept = redis.call('HGET', KEYS[1], ARGV[1])
local revision = kept and tostring(cjson.decode(kept).revision or 0) or ''
if revision ~= ARGV[2] then
  return 0
end
redis.call('HSETNX', KEYS[3], 'id', ARGV[4])
redis.call('ZADD', KEYS[2], redis.call('HINCRBY', KEYS[3], 'changes', 1), ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
RECORDS_SINCE = """
redis.call('HSETNX', KEYS[3], 'id', ARGV[4])
local id = redis.call('HGET', KEYS[3], 'id')
local last = id == ARGV[1] and ARGV[2] or '0'
local found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. last, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[3])
local names = {}
for place = 1, #found, 2 do
  names[#names + 1], last = found[place], found[place + 1]
end
return {id, last, #names > 0 and redis.call('HMGET', KEYS[1], unpack(names)) or {}}
"""
DOCUMENTS = Path(__file__).with_name("redis_documents.lua").read_text()
GET_HEADS = """
local heads = {}
for number, key in ipairs(KEYS) do
  heads[number] = redis.call('HGET', key, 'head')
end
return heads
"""


def charge_arguments(charges: Sequence[Charge], lease_seconds: float) -> list[object]:
    """Return the arguments of the script for charges, five for each."""
    return [part for charge in charges for part in _charge_arguments(charge, lease_seconds)]


def _charge_arguments(charge: Charge, lease_seconds: float) -> tuple[object, ...]:
    if isinstance(charge, RateCharge):
        return "rate", charge.key, charge.amount, charge.limit, charge.period_seconds
    if isinstance(charge, SlotCharge):
        return "lease", charge.key, 1, charge.limit, 2 * lease_seconds
    keep_seconds = -1 if math.isinf(charge.keep_seconds) else charge.keep_seconds
    return "spend", charge.key, charge.amount, charge.limit, keep_seconds


def use_arguments(uses: Sequence[SliceUse]) -> list[object]:
    """Return the arguments of the script for the slices of a report."""
    return [part for use in uses for part in _use_arguments(use)]


def _use_arguments(use: SliceUse) -> tuple[object, ...]:
    kind, key, _, limit, seconds = _charge_arguments(use.charge, SLICE_ACCOUNT_SECONDS / 2)
    refunds = [part for poured_at, amount in use.refunds for part in (repr(poured_at), amount)]
    amounts = (use.unused, use.reserved, use.used, use.needed, use.wanted)
    return kind, key, limit, seconds, *amounts, len(use.refunds), *refunds


def retry_after_seconds(text: bytes) -> float | None:
    """The seconds that the script answered for a rejected charge. None if waiting does not help."""
    if text == b"held":
        return HELD_RETRY_SECONDS
    return float(text) if text else None


def tenants_key(owner: str) -> str:
    """The key of the set of tenants in which an owner has reservations."""
    return f"wp:{{owner:{quote(owner, safe='')}}}:tenants"


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, at least one, since Redis rejects an expiry of zero."""
    return max(1, round(seconds * 1000))


def tenant_key(tenant: str) -> str:
    """The key of a tenant's documents."""
    return f"wp:{{{quote(tenant, safe='')}}}"


def document_key(tenant: str, name: str) -> str:
    """The key of one document."""
    return f"{tenant_key(tenant)}:document:{name}"


def blob_key(key: str) -> str:
    """The key of a cached blob."""
    return f"wp:blob:{key}"
