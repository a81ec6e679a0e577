"""The page: a window on runs and checkpoints. Knows gradio and plotly; nothing below it does."""
