"""How much the agents of a run may ask for, of all proxies on its store together."""
