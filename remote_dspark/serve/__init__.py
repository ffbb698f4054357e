"""The drafter worker: one process, one model, one configuration file, served over wire v2.

``python -m remote_dspark.serve --config worker.toml``. The wire's own rules are in ``remote_dspark.wire``, the drafting
in ``remote_dspark.drafter``; here they meet a process: configuration, health, metrics, signals, logs, exit codes.
"""
