"""Learning rates: the values of vit_jax and big_transfer, and what holds for every schedule."""

import numpy as np
import pytest

from keras_vit import UserError
from tests.support import FIXTURES, GOLDEN
from training.loop.optimizers import LearningRate
from training.recipes.recipe import Schedule

CASES = GOLDEN["lr_schedules"]["cases"]
RECORDED = np.load(FIXTURES / "lr_schedules.io.npz")


def rates(rate: LearningRate, steps) -> np.ndarray:
    return np.asarray(rate(np.array(steps, np.int64)))


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("bit")])
def test_cosine_and_linear_are_those_of_vit_jax(case):
    facts = CASES[case]
    ends = {"linear_end": facts["linear_end"]} if "linear_end" in facts else {}
    schedule = Schedule(facts["decay_type"], facts["warmup_steps"], **ends)
    rate = LearningRate(schedule, facts["base"], facts["total_steps"])
    np.testing.assert_allclose(
        rates(rate, RECORDED[f"{case}.steps"]), RECORDED[f"{case}.lr"], **GOLDEN["lr_schedules"]["tolerance"]
    )


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("bit")])
def test_stairs_are_those_of_the_bit_hyperrule(case):
    warmup, *stairs, end = CASES[case]["supports"]
    schedule = Schedule("stair", warmup, stairs=tuple(stair / end for stair in stairs))
    expected = RECORDED[f"{case}.lr"]
    training = np.isfinite(expected)  # afterwards the rule says to stop
    found = rates(LearningRate(schedule, CASES[case]["base_lr"], end), RECORDED[f"{case}.steps"][training])
    np.testing.assert_allclose(found, expected[training], **GOLDEN["lr_schedules"]["tolerance"])
    assert not training[RECORDED[f"{case}.steps"] >= end].any()


def test_rsqrt_falls_by_the_root_of_two_after_its_timescale_and_cools_down_to_zero():
    rate = LearningRate(Schedule("rsqrt", 10, timescale=100, cooldown_steps=50), 0.8, 1000)
    np.testing.assert_allclose(
        rates(rate, [0, 5, 10, 110, 950, 975, 1000]),
        [0.0, 0.4, 0.8, 0.8 / 2**0.5, 0.8 / 10.4**0.5, 0.4 / 10.65**0.5, 0.0],
        rtol=1e-6,
    )


def test_a_polynomial_rate_is_a_power_of_what_is_left_and_a_constant_one_stays():
    rate = LearningRate(Schedule("polynomial", 10), 0.5, 110)
    np.testing.assert_allclose(rates(rate, [5, 10, 60, 110]), [0.25, 0.5, 0.5 * 0.5**0.9, 0.0], atol=1e-7)
    np.testing.assert_array_equal(rates(LearningRate(Schedule("constant"), 0.5, 10), [0, 5, 10, 99]), 0.5)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"decay": "exponential"}, "decay must be one of cosine, linear, stair, rsqrt, polynomial, constant"),
        ({"decay": "stair"}, "decay stair needs the stairs where the learning rate drops; give --stairs 0.3 0.6 0.9"),
        ({"stairs": (0.6, 1.3)}, r"stairs must be in \(0, 1\), but is 1.3"),
    ],
)
def test_what_is_no_schedule_is_refused(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        Schedule(**fields)
