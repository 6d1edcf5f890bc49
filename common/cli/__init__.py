"""The command ``ddplab``: one small file per subcommand, heavy imports inside the one that runs."""
