"""Programs that start the ranks of one trainer: on this machine (`local.py`), as tasks of Slurm (`slurm.py`), or one
by one (`rank.py`)."""
