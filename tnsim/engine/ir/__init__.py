"""The intermediate representation: `problem`, `program`, `stages`; plans as JSON."""
