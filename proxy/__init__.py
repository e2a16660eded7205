"""The proxy: public API, trajectory store, engine life cycle and admin page. It never imports torch."""
