"""`base-rl attempts`: let an agent attempt the tasks of a file, and post its rewards.

`task_file` reads the tasks. `schedule` opens sessions and keeps as many attempts running as it may. `runners` runs
one attempt, as a program or a Python function, and `feedback` checks what it returned. `sessions` is the client of
the proxy. `journal` remembers finished attempts, so that an interrupted run continues.
"""
