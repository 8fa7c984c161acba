#!/bin/sh
# Copies Python, the guard, and the libraries that they need to an empty root: sh guard-root.sh FOLDER
set -eu
root=$1
library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mkdir -p "$root/etc"
mkdir -m 1777 "$root/tmp"
cd /
cp -a --parents usr/bin/python3* "${library#/}" opt/outrider "$root"
# Installers, documentation tools and GUI modules are not needed there.
cd "$root$library"
rm -rf ensurepip lib2to3 distutils pydoc_data idlelib tkinter test config-*
# Copy libraries to the paths where the loader looks for them. On some systems, /lib is a link to /usr/lib.
find "$root/usr" "$root/opt" -type f \( -name '*.so*' -o -name 'python3.*' \) -exec ldd {} + 2>/dev/null |
  grep -o '/[^ ]*' | grep -v ':$' | sort -u | while read -r file; do
    mkdir -p "$root$(dirname "$file")"
    cp -L "$file" "$root$file"
  done
echo "outrider:x:10001:10001::/tmp:/" > "$root/etc/passwd"
echo "outrider:x:10001:" > "$root/etc/group"
# Look up names first in /etc/hosts, which Kubernetes writes, then in DNS.
echo "hosts: files dns" > "$root/etc/nsswitch.conf"
