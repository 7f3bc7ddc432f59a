#!/bin/bash
# Train on four machines with eight GPUs each: sbatch docs/clusters/slurm.sh
# The directory of the repository and --workdir must be on a disk that all machines share.
#SBATCH --job-name=vit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Five minutes before the time is up, training saves a checkpoint and exits with code 75.
#SBATCH --signal=TERM@300

# Without the option, a site may kill the other workers before they have saved the checkpoint.
srun --kill-on-bad-exit=0 .venv/bin/python -m training.pretrain vit-b16-i21k --data tfds:imagenet21k \
  --strategy multi-worker --precision bfloat16 --workdir /shared/runs/b16
code=$?

# 75: interrupted, or a worker was lost; above 128: a worker was killed. All start again and continue from the last
# checkpoint. A worker that always dies, such as for memory, ends the job after ten restarts.
if ((code == 75 || code > 128)) && ((${SLURM_RESTART_COUNT:-0} < 10)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
