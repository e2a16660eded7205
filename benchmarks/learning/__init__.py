"""Does every preset learn? Agents in one process, the trainer's own intake, losses and optimiser, and policies that
are as stale as is asked."""
