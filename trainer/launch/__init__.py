"""Programs that start the ranks of one trainer: on this machine (`local.py`), or as tasks of Slurm (`slurm.py`)."""
