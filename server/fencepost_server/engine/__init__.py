"""Use cases and loops. The engine owns every transaction and asks domain for every decision."""
