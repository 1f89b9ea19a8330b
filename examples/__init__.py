"""Programs that use Fencepost, to learn from and to try out."""
