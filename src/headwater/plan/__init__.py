"""What a machine will do with a model, before either is there: arithmetic on sizes and rates."""
