"""API keys and who is behind them."""
