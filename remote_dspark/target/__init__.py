"""The embedded target server: one machine, OpenAI-compatible HTTP, speculative decoding through a remote drafter."""
