"""How a program comes in: by the direct trace, or by TorchDynamo."""
