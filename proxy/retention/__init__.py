"""What is kept and what is forgotten: erasing by session or user, and retention."""
