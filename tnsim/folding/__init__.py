"""Two models and a metric become one Problem."""
