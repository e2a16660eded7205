#!/bin/sh
# Make each secret of docker-compose.yml that does not exist yet, from random bytes, in the folder `secrets` beside it
# or in the folder named as the argument. Existing secrets stay as they are.
set -eu
folder=${1:-$(dirname "$0")/../secrets}
mkdir -p "$folder"
# Containers read the files as users of their own, which compose cannot set: the files are readable by all, and the
# folder only by its owner.
chmod 700 "$folder"
for name in postgres_password redis_password admin_key run_key trainer_key grafana_password; do
  if [ -s "$folder/$name" ]; then
    continue
  fi
  # Renamed when it is complete, so that no killed run leaves half a secret.
  (umask 077 && od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > "$folder/.$name")
  chmod 444 "$folder/.$name"
  mv -f "$folder/.$name" "$folder/$name"
  echo "made $folder/$name"
done
