"""A Problem in, numbers out; imports no model and no metric."""
