"""Current releases of OpenAI's and Anthropic's clients against a gateway: `make test-clients`. Not part of CI."""
