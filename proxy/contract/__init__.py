"""The words of base-rl as frozen types, with their wire form. A leaf: standard library and msgspec only."""
