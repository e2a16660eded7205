"""What publishing a version costs, by transport and size, beside a plain copy of the same bytes."""
