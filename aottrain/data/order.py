"""In which order examples are seen, by arithmetic alone: the place of any step is found without those before it.

An epoch is a permutation that is computed point by point, so that a thousand million examples need no list of them:
four or more rounds of a Feistel network on the least even number of bits (Luby & Rackoff 1988, "How to construct
pseudorandom permutations"), repeated until the value is one of the examples (cycle walking: Black & Rogaway 2002,
"Ciphers with arbitrary finite domains").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[Any]

ROUNDS = 6  # two more than the four of a pseudorandom permutation: small domains have few bits in each half
_MASK = (1 << 64) - 1
# The steps of splitmix64's finaliser: (shift, multiplier). Steele, Lea & Flood (2014), "Fast splittable pseudorandom
# number generators"; Vigna's constants.
_FINALISER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_STEP = 0xD1B54A32D192ED03


def mixed(values: Numbers) -> Numbers:
    """splitmix64's finaliser of each of the uint64 `values`: one bit of difference changes about half of the bits."""
    for shift, multiplier in _FINALISER:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(multiplier)
    return values


def step_generator(seed: int, step: int) -> torch.Generator:
    """A CPU generator for one step. The pair is mixed (splitmix64), so that neighbours do not draw alike."""
    z = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & _MASK
    return torch.Generator().manual_seed(int(mixed(np.array([z], dtype=np.uint64))[0]) >> 1)


def keys_of(seed: int, places: Numbers) -> Numbers:
    """A uint64 key for each place in the stream of examples, from which all that is drawn for that example follows."""
    start = np.uint64(seed * 0x9E3779B97F4A7C15 & _MASK)
    return mixed(mixed(places.astype(np.uint64) * np.uint64(_STEP) + np.uint64(1)) ^ start)


def permuted(numbers: Numbers, size: int, keys: Numbers) -> Numbers:
    """The images of `numbers`, each from 0 to below `size`, under the permutation that its key (uint64) names."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    values = _feistel(numbers.astype(np.uint64), half, keys)
    while (outside := values >= np.uint64(size)).any():
        values[outside] = _feistel(values[outside], half, keys[outside])
    return values.astype(np.int64)


def _feistel(values: Numbers, half: Any, keys: Numbers) -> Numbers:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for number in range(ROUNDS):
        drawn = mixed(right + keys + np.full_like(right, (number + 1) * _STEP & _MASK))
        left, right = right, left ^ (drawn & mask)
    return (left << half) | right


def in_epochs(places: Numbers, size: int, seed: int) -> Numbers:
    """The examples at these places of an endless stream in which each epoch has each of `size` examples once."""
    epochs, within = np.divmod(places, size)
    return permuted(within, size, keys_of(seed, epochs))


def fixed_split(size: int, num_held_out: int) -> tuple[Numbers, Numbers]:
    """(trained on, held out): numbers of examples, drawn alike for every run, so that no seed trains on what another
    holds out. Both ascend: a file is read in its own order."""
    order = permuted(np.arange(size), size, np.zeros(size, dtype=np.uint64))
    return np.sort(order[: size - num_held_out]), np.sort(order[size - num_held_out :])
