"""The recipe of the tiny pair: corpus, tokenizer, target, drafter, evaluation. Reproducible from seeds and digests.

``python -m remote_dspark.train corpus`` builds text and tokens on any machine; ``... fit`` trains both models from that
folder; ``python -m remote_dspark.train.evaluate`` measures the pair on held-out text. Nothing here serves.
"""
