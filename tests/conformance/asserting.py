"""Not a test's own file, whose assert statements pytest rewrites."""


def program(x):
    assert (x > 0).all(), "not positive"
    return x * 2
