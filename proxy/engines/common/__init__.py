"""The parts that the embedded and the scripted engine share: the wire format, the HTTP front and compiled grammars.

The package imports neither torch nor the other rooms of the proxy, but for the contract and the grammars.
"""
