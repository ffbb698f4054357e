"""Draw the weights of a synthetic shape (`drafter.shapes`): seeded on the device they are drawn on."""

from __future__ import annotations

import torch
from torch import Tensor

from remote_dspark.drafter.model import CheckpointIdentity, DSparkDrafter
from remote_dspark.drafter.shapes import SEED, synthetic_config, synthetic_identity

LOGIT_SPREAD = 3.0
"""Standard deviation of base logits: rows as peaked as a trained drafter's, so that supports and draws are ordinary."""


@torch.no_grad()
def synthetic_drafter(
    name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> DSparkDrafter:
    """A drafter with random weights of a shape, in evaluation mode.

    Args:
        name: One of `shapes.SHAPES`.
        device: Where the weights are drawn; another device draws other values from the same seed.
        dtype: Compute dtype of the backbone; the Markov tables are BF16 whatever it is.

    Raises:
        ConfigFieldError: No such shape.
    """
    with torch.device("meta"):
        model = DSparkDrafter(synthetic_config(name))
    generator = torch.Generator(device=device).manual_seed(SEED)
    weights: dict[str, Tensor] = {}
    for key, empty in sorted(model.state_dict().items()):
        kept = torch.bfloat16 if key.startswith("markov_head.") else dtype
        weights[key] = _draw(key, tuple(empty.shape), generator).to(kept)
    model.load_state_dict(weights, strict=True, assign=True)
    model.identity = CheckpointIdentity({}, synthetic_identity(name).draft_sha256)
    return model.requires_grad_(False).eval()


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norm weights near 1; matrices scaled so that their outputs have the spread of their inputs."""
    values = torch.randn(shape, generator=generator, device=generator.device)
    if len(shape) == 1:
        return 1.0 + 0.1 * values
    spread = LOGIT_SPREAD if name == "lm_head.weight" else 1.0
    inner = 1 if name in ("embed_tokens.weight", "markov_head.markov_w1.weight") else shape[-1]
    return values.mul_(spread * float(inner) ** -0.5)
