"""The numbers of Philox4x32-10, of which its versions in tensor ops, C++ and Triton are made.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of the first and the third word of a counter
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # added to the two words of a key after each round
NUM_ROUNDS = 10
FLOAT_BITS = 24  # of a word that become a uniform float32: as many as its significand has
