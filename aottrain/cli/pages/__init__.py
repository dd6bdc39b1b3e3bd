"""`report` and `watch`: pages of runs that there are, written, served, shown in the terminal."""
