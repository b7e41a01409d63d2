{{/* What shares memory with a worker runs in its pod, as a native sidecar: up before the worker, gone after it. */}}

{{- define "kvferry.sidecars" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $isWorker := has .role (include "kvferry.kvWorkers" $root | fromJsonArray) -}}
{{- if and $isWorker (eq $values.lmcache.mode "sidecar") }}
- name: lmcache   # it shares memory with the worker by /dev/shm
  restartPolicy: Always
  image: {{ include "kvferry.image" (dict "image" $values.lmcache.image "default" "") }}
  imagePullPolicy: {{ $values.lmcache.image.pullPolicy }}
  {{- with $values.lmcache.command }}
  command: {{ toJson . }}
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
  startupProbe:
    tcpSocket: {port: {{ $values.lmcache.port }}}
    periodSeconds: 2
    failureThreshold: 150
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: {{ $values.lmcache.cpu | quote }}, memory: {{ add (include "kvferry.bytes" $values.lmcache.memory | int64) 2147483648 | quote }}}
    limits: {memory: {{ add (include "kvferry.bytes" $values.lmcache.memory | int64) 2147483648 | quote }}}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if include "kvferry.hasStore" . }}
- name: kvstore   # its arena is an anonymous memory file, which the worker opens by the pod's common /proc
  restartPolicy: Always
  image: {{ include "kvferry.image" (dict "image" $values.image "default" $root.Chart.AppVersion) }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  args: [kvstore, --config, /etc/kvferry/kvstore.yaml]
  {{- with printf "%s%s" (include "kvferry.clusterKeyEnv" $root) (include "kvferry.redisEnv" $root) | trim }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  ports:
    - {name: store-ops, containerPort: {{ $values.ports.storeOps }}}
  startupProbe:
    httpGet: {path: /health, port: store-ops}
    periodSeconds: 2
    failureThreshold: 150
  livenessProbe:
    httpGet: {path: /health, port: store-ops}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
    terminationGracePeriodSeconds: 15
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  resources:
    {{- toYaml (default dict $values.kvstore.resources) | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/kvferry, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    {{- if $values.kvstore.disk.size }}
    - {name: store, mountPath: /var/lib/kvferry}
    {{- end }}
{{- end }}
{{- end -}}

{{/* The password of an existing Redis. */}}
{{- define "kvferry.redisEnv" -}}
{{- $redis := .Values.kvstore.redis -}}
{{- if and $redis.enabled $redis.existingSecret }}
- name: KVFERRY_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $redis.existingSecret | quote }}, key: {{ $redis.passwordKey | quote }}}}
{{- end }}
{{- end -}}

{{- define "kvferry.clusterKeyEnv" -}}
{{- if not .Values.security.insecure }}
- name: KVFERRY_CLUSTER_KEY
  valueFrom: {secretKeyRef: {name: {{ include "kvferry.clusterKeySecret" . | quote }}, key: {{ .Values.security.clusterKey.key | quote }}}}
- name: KVFERRY_OTHER_CLUSTER_KEYS   # while the key changes
  valueFrom: {secretKeyRef: {name: {{ include "kvferry.clusterKeySecret" . | quote }}, key: {{ .Values.security.clusterKey.othersKey | quote }}, optional: true}}
{{- end }}
{{- end -}}

{{/* The claim of a store's disk tier. */}}
{{- define "kvferry.storeClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.kvstore.disk.storageClassName }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.kvstore.disk.size }}
{{- end -}}
