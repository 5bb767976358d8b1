"""A folder for PYTHONPATH: its `sitecustomize` arms the plugin where the `.pth` file is not installed."""
