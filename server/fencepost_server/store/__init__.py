"""The only SQL of the server: statements, migrations, connections, and what the rows mean in Python."""
