"""Parts of base-rl on several machines: engines that join a pool by themselves, and the systems that place them."""
