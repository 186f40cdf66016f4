"""What the user wrote: policies as data, with the place of every word. Nothing here imports torch."""
