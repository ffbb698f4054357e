"""Wire v2 between a verifier and a drafter worker: sans-IO protocol, then one file per transport."""
