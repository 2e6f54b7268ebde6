"""What every package needs: faults, console, folders of runs, processes."""
