"""The best predicted knobs of a space, without predicting all of it where it is large."""

import numpy as np

from autotune.space import Space
from model.predictor import PredictionArray, Predictor
from model.spec import Knobs, Workload

#: spaces up to this size are predicted whole
_WHOLE = 3_000
#: passes over the blocks of knobs; a pass without a change ends it, most spaces take two
_PASSES = 4


def best_predicted(space: Space, predictor: Predictor, workload: Workload, start: Knobs) -> Knobs:
    """The possible knobs with the highest predicted median speed.

    Knobs of one block (speculation; collectives; each other knob) restrict one another, knobs of
    different blocks only meet in the time of a cycle. So a large space is searched a block at a
    time with the others held, from ``start`` on, until no block has anything better. That finds a
    best in every single block; that no change of two blocks together is better still is not proved.
    """
    if space.size <= _WHOLE:
        pool = space.sample(_WHOLE, 0)
        return pool[_best(predictor.predict_many(pool, workload))]
    best = space.nearest(start.values())
    open_blocks = [index for index, block in enumerate(space.blocks) if len(block.rows) > 1]
    #: blocks chosen with all others as they are now
    settled: set[int] = set()
    for index in open_blocks * _PASSES:
        if index in settled:
            break
        line = space.line(best, index)
        found = line[_best(predictor.predict_many(line, workload))]
        settled = {index} if found != best else settled | {index}
        best = found
    return best


def _best(many: PredictionArray) -> int:
    """Row of the fastest that fits; of the fastest of all where none does."""
    fitting = many.tokens_per_s
    return int(np.argmax(fitting if fitting.any() else many.tokens_per_s_quantiles[1]))
