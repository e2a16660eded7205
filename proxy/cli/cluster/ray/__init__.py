"""`base-rl up --ray`: engines and trainer placed on a Ray cluster, watched and replaced.

`plan.py` decides what is placed, `process.py` is the actor that starts one program, `groups.py` places actors and
replaces them, `up.py` is the command. Only `groups.py`, `up.py` and the actors import Ray.
"""
