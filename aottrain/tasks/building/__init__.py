"""What a task builds before it runs: the job, its model, optimizer, weights of a run, programs to go down to."""
