"""The only code that knows file formats."""
