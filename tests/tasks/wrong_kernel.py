"""A kernel backend that is wrong on purpose: every floating-point value comes out half as large again."""

import torch


def scaled(graph_module, example_inputs):
    def call(*inputs):
        values = graph_module(*inputs)
        return [value * 1.5 if torch.is_tensor(value) and value.is_floating_point() else value for value in values]

    return call
