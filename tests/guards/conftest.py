from tests.numerics.comparison import isolated

__all__ = ["isolated"]
