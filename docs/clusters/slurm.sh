#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=16
#SBATCH --signal=TERM@120 --requeue --open-mode=append
# Usage: sbatch slurm.sh PYTHON train.py --resume FLAGS. One task per GPU; no launcher.
endpoints=""
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    address=$(getent ahostsv4 "$node" | awk 'NR == 1 {print $1}')
    for ((i = 0; i < SLURM_NTASKS_PER_NODE; i++)); do
        endpoints+="${endpoints:+,}$address:$((${PORT:-6170} + 1 + i))"
    done
done
export PADDLE_TRAINER_ENDPOINTS=$endpoints PADDLE_MASTER=${endpoints%%:*}:${PORT:-6170}
export PADDLE_TRAINERS_NUM=$SLURM_NTASKS PADDLE_LOCAL_SIZE=$SLURM_NTASKS_PER_NODE

srun bash -c '
    IFS=, read -ra all <<<"$PADDLE_TRAINER_ENDPOINTS"
    export PADDLE_TRAINER_ID=$SLURM_PROCID PADDLE_CURRENT_ENDPOINT=${all[SLURM_PROCID]}
    export FLAGS_selected_gpus=$SLURM_LOCALID
    exec "$@"' task "$@"
code=$?
if [ $code = 75 ]; then # stopped by a signal, and the work is saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
