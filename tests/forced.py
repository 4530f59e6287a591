"""Routes that are taken wherever they are among those of a question, whatever they cost."""

from tnsim.all_pairs import preparation
from tnsim.compare import routes

OF_PAIRS = routes, "routes_of"  # the verbs of two models
OF_RUNS = preparation, "routes_of_run"  # runs over all pairs


def take(patch, name, *tables):
    """Let these tables offer one route alone, where they have it, as long as the patch holds."""
    for module, table in tables:
        every = getattr(module, table)

        def some(*arguments, every=every):
            found = every(*arguments)
            return [route for route in found if route.name == name] or found

        patch.setattr(module, table, some)
