"""Run as one of two processes by test_in_flight.py: many collectives under way at once, many times."""

import os

import torch
import torch.distributed as dist

import aottrain.ops.collectives  # noqa: F401  # makes the operators known

ROWS, NUM_ROUNDS = (3, 7, 1, 40, 2, 9), 1500


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    own, group = torch.ops.aottrain_parallel, dist.group.WORLD.group_name
    for number in range(NUM_ROUNDS):
        parts = [torch.full((rows, 5), float(rank + number)) for rows in ROWS]
        wholes = [own.gather_start(part, 2 * part.shape[0] - 1, 2, group) for part in parts]
        sums = own.sum_start(parts, group)
        cut = own.scatter_start([torch.cat([part, part]) for part in parts], 2, group)
        others = [torch.randn(17) for _ in range(5)]  # memory that is taken meanwhile
        for rows, whole, total, piece in zip(ROWS, wholes, sums, cut, strict=True):
            whole, total, piece = map(own.arrived, (whole, total, piece))
            assert whole[:rows].eq(number).all() and whole[rows:].eq(number + 1).all()
            assert total.eq(2 * number + 1).all() and piece.eq(2 * number + 1).all()
        del others
    print("all arrived")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
