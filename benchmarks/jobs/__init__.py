"""Workers that are killed again and again, with handlers that fail: is every job done exactly once?"""
