"""How much each drafted slot counts (contract B.6, C.3). S slots."""

import math

# DFlash's decay by rows of a block.
_DFLASH_DECAY = ((8, 4.0), (10, 5.0), (16, 7.0))
_DSPARK_DECAY = 4.0


def slot_weights(kind: str, gamma: int, weighting: str) -> list[float]:
    """One weight per slot: ones for `uniform`, `exp(-s / decay)` for `exp`, from slot 0.

    The decay is 4 for `dspark`; for `dflash` it follows the block size `gamma + 1`, linear between 8 -> 4, 10 -> 5 and
    16 -> 7 and constant outside.
    """
    if weighting == "uniform":
        return [1.0] * gamma
    decay = _DSPARK_DECAY if kind == "dspark" else _dflash_decay(gamma + 1)
    return [math.exp(-s / decay) for s in range(gamma)]


def _dflash_decay(block_size: int) -> float:
    (low, at_low), (middle, at_middle), (high, at_high) = _DFLASH_DECAY
    size = min(max(block_size, low), high)
    if size <= middle:
        return at_low + (at_middle - at_low) * (size - low) / (middle - low)
    return at_middle + (at_high - at_middle) * (size - middle) / (high - middle)
