"""The arithmetic of many proxies: costs measured on one machine, and a simulation of 1, 10 and 100 proxies."""
