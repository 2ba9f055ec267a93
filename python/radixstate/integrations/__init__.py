"""Ready-made glue between the prefix cache and model code that other people wrote."""
