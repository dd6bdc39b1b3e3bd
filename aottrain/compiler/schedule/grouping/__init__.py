"""Which calls of a graph become one kernel: groups of calls that share a loop nest, grown, merged and compared."""
