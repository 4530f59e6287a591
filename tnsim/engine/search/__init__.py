"""The search for cheap compiled programs: `paths`, `sharing`, `routes`; `stages` puts them
together."""
